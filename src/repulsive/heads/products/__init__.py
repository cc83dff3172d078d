"""Products of activations with weights that are bare parameters, as in einsum notation."""
