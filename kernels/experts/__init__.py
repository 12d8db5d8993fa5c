"""A mixture of experts: routing, and the experts' products."""
