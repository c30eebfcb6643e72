"""What the code of a user's function names, looked at before it runs on stand-ins."""
