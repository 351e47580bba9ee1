"""What a sequence keeps between steps: its pages, their reference counts, and prefixes that later prompts can share."""
