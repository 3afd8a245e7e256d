"""Drop-in replacements for other projects' offloading interfaces."""
