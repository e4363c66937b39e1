"""What torchferry measures of itself, beside others."""
