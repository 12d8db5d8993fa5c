"""Matrix products in 8 bits: quantisation by rows and by columns, and the products of the results.

May import the folder above.
"""
