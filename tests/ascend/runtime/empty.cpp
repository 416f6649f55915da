// For the libraries that a wheel links and takes nothing from. It looks names up in each of them,
// so they link the one that has the names.
