"""What training needs of the library: the order of layers, and batches of prompts and completions."""
