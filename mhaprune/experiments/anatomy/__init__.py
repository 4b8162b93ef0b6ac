"""One call of the attention layer, tensor by tensor, and what dividing by the root of d_head is for."""
