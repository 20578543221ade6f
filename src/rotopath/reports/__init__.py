"""Tables and figures for people to read."""
