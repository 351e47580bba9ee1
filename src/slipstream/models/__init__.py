"""One file per target family, named after its model_type, and the DFlash drafter; `cpu/` and `gpu/` run them."""
