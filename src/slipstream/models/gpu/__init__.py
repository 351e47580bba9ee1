"""How a GPU runs the parts that layers consist of, and how weights get into its memory."""
