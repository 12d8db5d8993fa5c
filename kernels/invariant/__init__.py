"""Results of a token that do not depend on the rest of the batch.

May import nothing but torch and the modules of this room, which the other rooms import.
"""
