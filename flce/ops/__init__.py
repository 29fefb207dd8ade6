"""Operators behind the public functions: argument checks, custom operators and autograd."""
