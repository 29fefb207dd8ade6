"""How an operator is known to PyTorch: registration, `vmap`, formulas of flops, frames of `torch.compile`."""
