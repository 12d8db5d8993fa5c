"""The kinds of attention, the backends that compute it, rotary tables, QK-norm and the key/value cache."""
