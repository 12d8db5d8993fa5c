"""Flash attention over packed documents, with windows, soft caps and sinks.

May import only the folder above; recurrent kernels import its bounds of documents.
"""
