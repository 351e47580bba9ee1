"""Everything a sequence keeps between steps: pages, who holds them, and which prefixes they can serve again."""
