"""What is installed, what is wrong in it, how it is patched; touches no tensor."""
