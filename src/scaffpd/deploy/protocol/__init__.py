"""What goes between a coordinator and a silo: bytes, and what they may say."""
