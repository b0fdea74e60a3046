"""Named configuration files for recipes and commands (model shapes, DeepSpeed), and the code that reads them."""
