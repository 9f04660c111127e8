"""The low-precision Linear and its parts."""
