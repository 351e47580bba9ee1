"""What a sequence keeps between steps: its pages, their reference counts, and the prefixes they can serve again."""
