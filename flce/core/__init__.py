"""What all other parts of the package use, and which uses none of them."""
