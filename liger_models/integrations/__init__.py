"""Backends of other frameworks, made of our models. Each module needs its framework installed.

May import everything else; nothing imports them. Frameworks find them through entry points.
"""
