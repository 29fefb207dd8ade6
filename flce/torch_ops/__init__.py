"""Registration of custom operators with PyTorch: rules for `vmap`, FLOP formulas, frames of `torch.compile`."""
