"""The dry run of a recipe, which estimates the memory and the time that the run takes."""
