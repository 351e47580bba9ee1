"""Reading model files: where they come from, how their headers are checked, how their tensors become numbers."""
