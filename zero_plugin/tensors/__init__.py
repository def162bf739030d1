"""The tensors of modules and files: names, pieces, formats."""
