"""Prove that gates have an effect and close all, and that removing heads equals masking them."""
