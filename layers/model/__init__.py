"""The whole model: decoder stack, language-model head, loss, scores, distillation and the output types.

May import every other package of the layers; only code above `layers` imports it.
"""
