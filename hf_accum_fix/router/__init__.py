"""The router loss of a mixture of experts."""
