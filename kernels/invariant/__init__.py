"""Results of a token that do not depend on the rest of the batch.

May import only torch and its own modules; the other kernel packages import it.
"""
