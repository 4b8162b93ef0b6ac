"""One call of the attention layer, tensor by tensor, and why scores are divided by the root of d_head."""
