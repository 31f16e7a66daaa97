"""Real models of other people, taken out of public packages."""
