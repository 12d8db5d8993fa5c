"""Models as users meet them: loading, saving, generation and classification on top of `layers.model`.

May import architectures, layers and checkpoints; training, the command line and adapters import it.
"""
