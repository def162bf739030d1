"""Fills every open field by one small rule from facts to a value and its reason."""
