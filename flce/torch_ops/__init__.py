"""Registration of custom operators with PyTorch: FLOP formulas, frames of `torch.compile`."""
