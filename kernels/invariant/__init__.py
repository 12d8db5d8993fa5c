"""Results of a token that do not depend on the rest of the batch.

May import only torch and modules of this room; the other rooms import it.
"""
