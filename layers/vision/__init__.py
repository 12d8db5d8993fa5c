"""How a model sees: pictures cut into patches, the encoder of these, and its way into the language model."""
