"""A launch spec, the command it becomes, and the workers it supervises; imports no torch at module level."""
