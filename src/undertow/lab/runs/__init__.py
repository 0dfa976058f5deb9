"""An experiment on disk: its recipe, and the folder that it is trained in."""
