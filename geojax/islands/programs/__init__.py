"""The compiled programs of a site, and the values that they hand to one another."""
