"""Studies: grids of recipes, trained and evaluated with several seeds."""
