"""Made-up parts of layers, each with its spec and its layer; nothing in the package knows them."""
