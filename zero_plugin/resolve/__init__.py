"""Fill every open field by one small rule from facts to (value, reason); imports no torch."""
