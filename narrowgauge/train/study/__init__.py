"""A study: the same run with several recipes and several seeds, and what their finals say of each recipe."""
