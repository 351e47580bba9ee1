"""How a CPU runs the parts that layers consist of: plain torch calls, or one compiled pass for a whole stack."""
