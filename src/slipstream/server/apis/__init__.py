"""The APIs: each one translates its bodies into jobs, and the answers back into its own field names."""
