"""Token mixers for pictures of one size, whose patches form a square grid."""
