"""The Linear that a user touches, and what it is made of."""
