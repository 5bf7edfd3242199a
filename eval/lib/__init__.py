"""Code that the scripts of eval/ share; scripts import it, and it imports no script."""
