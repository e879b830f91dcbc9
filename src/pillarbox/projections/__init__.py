"""Read models: tables that events write, and that can be written anew."""
