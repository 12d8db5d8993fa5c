"""Recurrent mixers: short convolutions, linear attention, and the states that they carry."""
