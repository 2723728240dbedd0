"""Layers that methods put into models, and how: choosing, replacing, folding, gradients by sample."""
